"""Derivatives: the backward walk (vjp), forward mode (jvp), custom gradients, and functions of functions."""
