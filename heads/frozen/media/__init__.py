"""Images and sounds that a target reads: `reading` opens one safely, `processor` makes a model's inputs of them."""
