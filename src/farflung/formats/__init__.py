"""Number formats of weights and of the key-value cache: real codes and scales, each with its own rounding (torch)."""
