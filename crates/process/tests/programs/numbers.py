# NumPy with its threads, a mapped array and a random generator, whose state goes on.
import numpy

steps = Steps()
mapped = numpy.memmap(f"{folder}/array", dtype="u8", mode="w+", shape=(steps.count + 1,))
mapped[0] = steps.nonce
matrix = numpy.eye(300)
random, again = numpy.random.default_rng(steps.nonce), numpy.random.default_rng(steps.nonce)
drawn = []
with numpy.errstate(over="ignore"):
    for step, value in steps:
        mapped[step] = mapped[step - 1] * numpy.uint64(6364136223846793005) + numpy.uint64(1)
        require(int(mapped[step]) == value, "another value")
        matrix = matrix @ matrix.T + numpy.eye(300) if step % 50 else numpy.eye(300)
        matrix /= matrix.max()
        require(numpy.count_nonzero(matrix - numpy.diag(numpy.diagonal(matrix))) == 0, "another matrix")
        drawn.append(random.random())
require(drawn == [again.random() for _ in drawn], "other random numbers")
os._exit(7)
