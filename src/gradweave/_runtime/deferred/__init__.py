"""Stand-ins for parameters and gradients that are not there yet, or not to be touched."""
