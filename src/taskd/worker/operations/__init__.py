"""Operations that a training process carries out while training is paused."""
