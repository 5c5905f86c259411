"""Dynamic sampling in virtual time over modelled servers; see tests/simulation/measure_sampling.py."""
