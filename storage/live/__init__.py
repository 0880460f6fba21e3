"""Services that run while a learner trains."""
