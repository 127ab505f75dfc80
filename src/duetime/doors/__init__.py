"""The ways in. Each door turns what its clients send into checked values for the service, and the service's answers
and errors into its own shape; none has rules of its own about timers."""
