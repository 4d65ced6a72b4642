"""The errors that this package raises on purpose.

Each message names what was wrong and what is allowed.
"""


class K3Error(ValueError):
    """Any mistake in what the caller passed."""


class InputError(K3Error):
    """A tensor or an argument of the wrong shape, dtype or range."""


class ConfigError(K3Error):
    """A configuration that describes no model."""


class CheckpointError(K3Error):
    """A checkpoint folder that does not hold the model its configuration describes."""


class TrainingError(K3Error):
    """A run that can't go on: a loss or a gradient that is no number."""
