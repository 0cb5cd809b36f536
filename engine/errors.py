"""What the engine raises for input it cannot serve; faults of our own code are assertions.

    PilotfishError
    ├── OptionError            an option asks for what the model or the machine cannot give
    ├── BusyError              what is asked for is there, and in use or out of reach now: another try may find it
    ├── RequestError           a request that cannot be run as asked
    ├── ConfigError            config.json is malformed, or asks for something that is not honoured
    ├── the server's own       keys, certificates, tokenizer, template: raised where they are read
    └── CheckpointError        the files of a checkpoint folder are damaged, incomplete or contradict one another
        ├── HeaderError        a safetensors header that cannot be trusted
        └── LayoutError        weights in a recognised layout that this version does not read

Each message says what was wanted and what came, and names the file, field or module.
"""


class PilotfishError(Exception):
    """Base of every error that input can cause."""


class ConfigError(PilotfishError):
    """A config.json that is malformed or describes a model that is not served."""


class CheckpointError(PilotfishError):
    """A checkpoint folder whose files are damaged, incomplete or contradict one another."""


class HeaderError(CheckpointError):
    """A safetensors header that is malformed or does not fit its file."""


class LayoutError(CheckpointError):
    """Weights stored in a layout that is recognised but not read."""


class OptionError(PilotfishError):
    """An option asks for what the model or the machine cannot give."""


class BusyError(PilotfishError):
    """Something is in use by others, or out of reach for now: the same command may work later."""


class RequestError(PilotfishError):
    """A request that cannot be run as asked."""
