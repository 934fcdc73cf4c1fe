"""A Keras model: pip install 'manyhands[keras]'; manyhands verify examples/keras_digits.py:digits --workers 2

Keras must run on torch, which is said before it is imported.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from keras import layers
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import manyhands as mh


def network() -> keras.Model:
    """A small convolutional network with batch norm and dropout; it begins with its input shape."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.1),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )


def digits() -> mh.Task:
    """Tell handwritten digits apart."""
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1) / 16
    return mh.Task(
        name="keras-digits",
        model=network,
        train=(images[:1500], labels[:1500]),
        test=(images[1500:], labels[1500:]),
        loss=cross_entropy,
        target=0.9,
        defaults=mh.Defaults(
            batch=32, epochs=4, recipe="constant", recipe_options={"optimizer": "adam", "lr": 0.003}
        ),
    )
