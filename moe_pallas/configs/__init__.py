"""Configurations of the kernels: what may be chosen, what is legal, what is chosen by default."""
