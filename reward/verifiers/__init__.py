"""The verifiers of this package, one file each; `reward.registry` names them."""
