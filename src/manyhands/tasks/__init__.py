"""What is learned: one row a task, and the way to a user's own `path/to/file.py:name`."""

from manyhands.core.registry import Entry

TASKS: dict[str, Entry] = {
    "quadratic": Entry("manyhands.tasks.quadratic:quadratic", "closed form: every iterate is known"),
    "digits-mlp": Entry("manyhands.tasks.digits:digits_mlp", "8x8 digits, embedded: no download"),
    "mnist-mlp": Entry("manyhands.tasks.mnist:mnist_mlp", "784-1024-1024-10 on MNIST"),
    "mnist-cnn": Entry("manyhands.tasks.mnist:mnist_cnn", "two convolutions on MNIST"),
    "mnist-resnet": Entry(
        "manyhands.tasks.mnist:mnist_resnet", "small residual network with batch norm on MNIST"
    ),
    "fashion-cnn": Entry("manyhands.tasks.mnist:fashion_cnn", "two convolutions on Fashion-MNIST"),
    "cifar-resnet": Entry("manyhands.tasks.cifar:cifar_resnet", "ResNet-20 on CIFAR-10"),
    "blood-vgg19": Entry("manyhands.tasks.image_folders:blood_vgg19", "VGG-19 on a folder of images"),
    "imagenet-resnet50": Entry(
        "manyhands.tasks.image_folders:imagenet_resnet50", "ResNet-50 on a folder of images"
    ),
    "sparse-logistic": Entry(
        "manyhands.tasks.sparse_logistic:sparse_logistic",
        "logistic regression on sparse data with a known separator",
    ),
}
