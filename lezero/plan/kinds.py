"""What a block of memory is for."""

PARAMETER, GRADIENT, OPTIMIZER, BUFFER = "parameters", "gradients", "optimizer", "buffers"
ACTIVATION, TEMPORARY = "activations", "temporaries"
WHOLE, WIRE, FEEDBACK = "whole copies", "wire buffers", "feedback"
