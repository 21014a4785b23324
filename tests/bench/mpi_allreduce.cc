// The baseline that ps_bench starts where MPI is: MPI_Allreduce of floats among all ranks.
//
//   mpirun -np N ps_bench_mpi BYTES REPEATS      rank 0 prints each repeat's seconds, one a line
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 3) {
    std::fprintf(stderr, "usage: ps_bench_mpi BYTES REPEATS\n");
    MPI_Finalize();
    return 2;
  }
  const auto elements = static_cast<int>(std::atoll(argv[1]) / static_cast<long long>(sizeof(float)));
  const int repeats = std::atoi(argv[2]);
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const std::vector<float> mine(static_cast<size_t>(elements), 1);
  std::vector<float> sum(mine.size());
  bool right = true;
  for (int i = -3; i < repeats; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double began = MPI_Wtime();
    MPI_Allreduce(mine.data(), sum.data(), elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    const double took = MPI_Wtime() - began;
    for (float value : sum) right = right && value == static_cast<float>(ranks);
    if (rank == 0 && i >= 0) std::printf("%.9f\n", took);
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
