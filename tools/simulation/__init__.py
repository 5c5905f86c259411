"""Dynamic sampling in virtual time over modelled servers; see tools/simulate_sampling.py."""
