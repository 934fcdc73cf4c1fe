"""What is learned: one row a task, and the way to a user's own `path/to/file.py:name`."""

from manyhands.axes import Member

TASKS: dict[str, Member] = {
    "quadratic": Member("manyhands.tasks.quadratic:quadratic", "closed form: every iterate is known"),
    "digits-mlp": Member("manyhands.tasks.digits:digits_mlp", "8x8 digits, embedded: no download"),
    "mnist-mlp": Member("manyhands.tasks.mnist:mnist_mlp", "784-1024-1024-10 on MNIST"),
    "mnist-cnn": Member("manyhands.tasks.mnist:mnist_cnn", "two convolutions on MNIST"),
    "mnist-resnet": Member(
        "manyhands.tasks.mnist:mnist_resnet", "small residual network with batch norm on MNIST"
    ),
    "fashion-cnn": Member("manyhands.tasks.mnist:fashion_cnn", "two convolutions on Fashion-MNIST"),
    "cifar-resnet": Member("manyhands.tasks.cifar:cifar_resnet", "ResNet-20 on CIFAR-10"),
    "blood-vgg19": Member("manyhands.tasks.images:blood_vgg19", "VGG-19 on a folder of images"),
    "imagenet-resnet50": Member(
        "manyhands.tasks.images:imagenet_resnet50", "ResNet-50 on a folder of images"
    ),
    "sparse-logistic": Member(
        "manyhands.tasks.sparse:sparse_logistic",
        "logistic regression on sparse data with a known separator",
    ),
}
