"""The split backward of linear and convolution calls: input gradients at once, weight gradients as tasks for later."""
