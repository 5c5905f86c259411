"""Dynamic sampling in virtual time over modelled servers; see tools/benchmarks/simulate_sampling.py."""
