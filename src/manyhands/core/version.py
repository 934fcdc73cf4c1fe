"""The version of this package, as it is told on the command line and in records."""

VERSION = "0.1.0"
