"""The errors that this package raises on purpose.

Each message names what was wrong and what is allowed.
"""


def shown(value, most: int = 80) -> str:
    """`value` as a message can show it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:       # of an integer of 5000 digits, for one
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most - 3]}..."


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
