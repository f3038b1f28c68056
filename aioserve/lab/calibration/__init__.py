"""`calibrate`: what steps of a real model take here, as a step-time model."""
