"""What is learned: one row per task. A user's own task is `path/to/file.py:name`."""

from manyhands.core.registry import Entry

TASKS: dict[str, Entry] = {
    "quadratic": Entry(
        "manyhands.tasks.quadratic:quadratic", "quadratic function with a closed-form solution, for tests"
    ),
    "digits-mlp": Entry("manyhands.tasks.digits:digits_mlp", "small network on 8x8 digits, no download"),
    "mnist-mlp": Entry("manyhands.tasks.mnist:mnist_mlp", "MLP 784-1024-1024-10 on MNIST"),
    "mnist-cnn": Entry("manyhands.tasks.mnist:mnist_cnn", "CNN with two convolutions on MNIST"),
    "mnist-resnet": Entry("manyhands.tasks.mnist:mnist_resnet", "small ResNet with batch norm on MNIST"),
    "fashion-cnn": Entry("manyhands.tasks.mnist:fashion_cnn", "CNN with two convolutions on Fashion-MNIST"),
    "fashion-resnet": Entry(
        "manyhands.tasks.mnist:fashion_resnet", "small ResNet with batch norm on Fashion-MNIST"
    ),
    "cifar-resnet": Entry("manyhands.tasks.cifar:cifar_resnet", "ResNet-20 on CIFAR-10"),
    "blood-vgg19": Entry("manyhands.tasks.image_folders:blood_vgg19", "VGG-19 on a folder of images"),
    "imagenet-resnet50": Entry(
        "manyhands.tasks.image_folders:imagenet_resnet50", "ResNet-50 on a folder of images"
    ),
    "sparse-logistic": Entry(
        "manyhands.tasks.sparse_logistic:sparse_logistic",
        "logistic regression on generated sparse data or svmlight files",
    ),
}
