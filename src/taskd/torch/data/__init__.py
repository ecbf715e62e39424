"""The data of a training script: loaders, datasets and samplers, by the number of the step."""
