"""Every error that this library raises on purpose, as one tree.

KnnMoeError
├── ConfigError              a value is outside its range
├── ReferenceSetError        the reference set cannot be read, or is empty
├── LabelError               prompts cannot be labelled, or the judge does not answer
├── TaskError                there is no such task, or it is malformed
│   └── TaskDataError            its data is not available, or its reference and test sets overlap
├── ProgramError             generated programs may not run here, or cannot be confined
├── RunError                 the results of an evaluation cannot be written or read
├── ModelError               the model cannot be loaded
│   ├── UnsupportedModelError    it has no router that this library can find or intercept
│   └── ModelTooLargeError       it does not fit in memory
├── MemoryFormatError        a folder contains no memory, or a damaged one
├── MemoryMismatchError      a memory belongs to another model, or two memories do not match
├── BuildError               a build cannot start or continue
├── DiskFullError            there is less space than a file needs
├── CalibrationError         a memory cannot be calibrated on these examples
├── PruningError             the cases of a memory cannot be scored
├── ServeError               the server cannot start, or not take a request
│   ├── BusyError                too many requests wait
│   ├── StoppedError             the server is stopping, or has failed
│   └── UnknownMemoryError       the memory that a request names is not loaded
├── MissingDependencyError   an optional package is not installed
└── AttachError              a memory cannot be attached to a model
    ├── RouterNotCalledError     the model ran without calling an attached router
    └── NothingReadError         nothing was recorded, so there is nothing to explain

Each message says what is wrong, the value that was seen, and what to do about it.
"""


class KnnMoeError(Exception):
    """Base class of all errors of this library."""


class ConfigError(KnnMoeError, ValueError):
    """A value is outside its range."""


class ReferenceSetError(KnnMoeError, ValueError):
    """The reference set cannot be read, or is empty."""


class LabelError(KnnMoeError):
    """Prompts cannot be labelled, or the judge does not answer."""


class TaskError(KnnMoeError, ValueError):
    """There is no such task, or it is malformed."""


class TaskDataError(TaskError):
    """The data of a task is not available, or its reference and test sets overlap."""


class ProgramError(KnnMoeError):
    """Generated programs may not run here, or cannot be confined."""


class RunError(KnnMoeError):
    """The results of an evaluation cannot be written or read."""


class ModelError(KnnMoeError):
    """The model cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The model has no router that this library can find or intercept."""


class ModelTooLargeError(ModelError):
    """The model, or a batch on it, does not fit in memory."""


class MemoryFormatError(KnnMoeError):
    """A folder contains no memory, or one that is truncated, edited or of a newer format."""


class MemoryMismatchError(KnnMoeError):
    """A memory belongs to another model, or two memories do not match."""


class BuildError(KnnMoeError):
    """A build cannot start or continue."""


class DiskFullError(KnnMoeError):
    """There is less space on the disk than a file needs."""


class CalibrationError(KnnMoeError):
    """A memory cannot be calibrated on these examples."""


class PruningError(KnnMoeError):
    """The cases of a memory cannot be scored."""


class ServeError(KnnMoeError):
    """The server cannot start, or not take a request."""


class BusyError(ServeError):
    """Too many requests wait."""


class StoppedError(ServeError):
    """The server is stopping, or has failed."""


class UnknownMemoryError(ServeError):
    """The memory that a request names is not loaded."""


class MissingDependencyError(KnnMoeError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""


class AttachError(KnnMoeError):
    """A memory cannot be attached to a model."""


class RouterNotCalledError(AttachError):
    """The model ran without calling a router that a memory is attached to."""


class NothingReadError(AttachError):
    """`explain()` was called without tokens, and none were recorded."""
