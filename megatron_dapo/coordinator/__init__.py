"""The coordinator: it starts trainer and servers, and one loop carries prompt groups from the ledger to new weights."""
