"""What ranks share: process groups, one description of the training, changes in lockstep, links, and their loss."""
