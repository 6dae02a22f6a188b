"""The planned module, the contract with the runtime: data, checks, predictions, report."""
