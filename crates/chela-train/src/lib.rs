//! Leases a batch, runs learner and loss, checkpoints, publishes, rolls back.
