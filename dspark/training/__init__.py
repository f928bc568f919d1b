"""Makes a drafter for a target: data, target features, loss, training loop, offline evaluation."""
