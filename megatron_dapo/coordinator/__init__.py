"""The coordinator: Ray places the parts, one loop carries prompt groups from the ledger to new weights."""
