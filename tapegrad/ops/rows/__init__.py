"""Operations with kernels of their own that walk along rows, and pooling."""
