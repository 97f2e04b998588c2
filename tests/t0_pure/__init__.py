"""Level 0: values in, values out; no network, no mount."""
