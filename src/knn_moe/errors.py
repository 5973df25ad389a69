"""Every error a user can meet, as one tree.

KnnMoeError
├── ConfigError              a setting outside its range
├── ReferenceSetError        the reference set cannot be read or holds nothing
├── LabelError               prompts cannot be labelled, or a judge cannot be asked
├── TaskError                no such benchmark, or not in the form one has
│   └── TaskDataError            its rows cannot be had, or its reference is in its test
├── RunError                 results of an evaluation cannot be written or read
├── ModelError               the model cannot be loaded
│   ├── UnsupportedModelError    it has no router this library can find or intercept
│   └── ModelTooLargeError       it does not fit in memory
├── MemoryFormatError        a folder that is no memory, or not a whole one
├── MemoryMismatchError      a memory that belongs to another model, or to another memory
├── BuildError               a build cannot start, or cannot go on
├── CalibrationError         too little to calibrate on
├── PruningError             nothing to prune by, or nothing left
├── MissingDependencyError   an optional part is not installed
└── AttachError              a memory cannot be put on a model
    ├── RouterNotCalledError     a router was attached but the model went around it
    └── NothingReadError         what the model read is not known, so it cannot be explained

Each message says what, the value seen, and the way out, in one sentence or two.
"""


class KnnMoeError(Exception):
    """Base class: catch this to catch everything this library raises on purpose."""


class ConfigError(KnnMoeError, ValueError):
    """A setting is outside its range."""


class ReferenceSetError(KnnMoeError, ValueError):
    """The reference set cannot be read, or holds nothing."""


class LabelError(KnnMoeError):
    """Prompts cannot be labelled, or a judge cannot be asked."""


class TaskError(KnnMoeError, ValueError):
    """There is no such benchmark, or it is not in the form one has."""


class TaskDataError(TaskError):
    """The rows of a benchmark cannot be had, or its reference is in its test."""


class RunError(KnnMoeError):
    """The results of an evaluation cannot be written, or cannot be read."""


class ModelError(KnnMoeError):
    """The model cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The model has no router this library can find or intercept."""


class ModelTooLargeError(ModelError):
    """The model, or a batch on it, does not fit in memory."""


class MemoryFormatError(KnnMoeError):
    """A folder holds no memory, or one that is truncated, edited or of a newer format."""


class MemoryMismatchError(KnnMoeError):
    """A memory belongs to another model, or two memories do not belong together."""


class BuildError(KnnMoeError):
    """A build cannot start, or cannot go on."""


class CalibrationError(KnnMoeError):
    """There is too little to calibrate a memory on."""


class PruningError(KnnMoeError):
    """Nothing says which cases of a memory to drop, or none would be left."""


class MissingDependencyError(KnnMoeError, ImportError):
    """An optional part is not installed; the message names the command that installs it."""


class AttachError(KnnMoeError):
    """A memory cannot be put on a model."""


class RouterNotCalledError(AttachError):
    """A router was attached, the model ran, and the router was never called."""


class NothingReadError(AttachError):
    """`explain()` was asked of what the model read last, and that is not known."""
