"""Models: load a checkpoint, run it in two parts around a layer, train one whose training set is known."""
