"""Learning: the drafters, their distillation, their evaluation and the gate. Torch in, plain records out."""
