// What normalisation does for training, and what a saved model and the metrics say of it.
#include <array>
#include <cmath>
#include <random>

#include "common/safetensors.h"
#include "tests/integration/cluster.h"
#include "tests/read_safetensors.h"

namespace ps {
namespace {

// Points around four corners of a square, its label the corner: one side in thousandths around 50, one in ten
// thousands.
void WriteCorners(const std::string& path) {
  std::mt19937 random(3);
  const auto uniform = [&] { return static_cast<double>(random()) / 4294967296.0; };
  std::ofstream out(path);
  out.precision(9);
  for (int i = 0; i < 400; ++i) {
    const int corner = i % 4;
    out << 50 + 0.001 * ((corner & 1) + 0.4 * uniform()) << "," << 1e4 * ((corner >> 1) + 0.4 * uniform()) << ","
        << corner << "\n";
  }
}

WorkerOptions Learner(const std::string& dataset, Normalize normalize) {
  WorkerOptions worker;
  worker.data.dataset = dataset;
  worker.data.normalize = normalize;
  worker.model = {.widths = {2, 16, 4}};
  worker.batch_size = 20;
  worker.epochs = 20;
  return worker;
}

ServerOptions ForTwo(float learning_rate) {
  ServerOptions server;
  server.num_workers = 2;
  server.hyperparameters.learning_rate = learning_rate;
  return server;
}

// The metadata of a safetensors file.
nlohmann::json Metadata(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  uint64_t bytes = 0;
  file.read(reinterpret_cast<char*>(&bytes), 8);
  std::string header(bytes, '\0');
  file.read(header.data(), static_cast<std::streamsize>(bytes));
  return nlohmann::json::parse(header)["__metadata__"];
}

TEST_CASE("A badly scaled table is learnt with the default, and not as it is", "[unsanitized]") {
  for (const Normalize normalize : {Normalize::kAuto, Normalize::kMinMax, Normalize::kNone}) {
    Cluster cluster(ForTwo(0.3F));
    const std::string table = cluster.folder.File("corners.csv");
    WriteCorners(table);
    const auto results = cluster.Train(Learner("csv:" + table, normalize), 2);
    if (normalize == Normalize::kNone) {
      // It may even diverge.
      CHECK((!results[0].ok() || *results[0]->test.accuracy < 0.6));
      continue;
    }
    REQUIRE(results[0].ok());
    CHECK(*results[0]->test.accuracy > 0.97);
    const std::string kind = normalize == Normalize::kAuto ? "standard" : "minmax";
    for (const char* file : {"worker-0.jsonl", "worker-1.jsonl"}) {
      CHECK(cluster.Events(file, "start")[0]["normalize"] == kind);
    }
    CHECK(Metadata(cluster.folder.File("final.safetensors"))["normalize"] == kind);
  }
}

std::vector<double> Numbers(const nlohmann::json& metadata, const std::string& key) {
  return nlohmann::json::parse(metadata[key].get<std::string>()).get<std::vector<double>>();
}

TEST_CASE("Losses of a regression are in the target's own units, and the saved model says how to use it",
          "[unsanitized]") {
  Cluster cluster(ForTwo(0.2F));
  const std::string table = cluster.folder.File("plane.csv");
  std::ofstream out(table);
  std::vector<std::array<double, 3>> rows;  // Two features and the target.
  double mean_square = 0;                   // How the targets vary around their mean.
  for (double a = -1; a <= 1; a += 0.25) {
    for (double b = -1; b <= 1; b += 0.25) {
      rows.push_back({100 + 10 * a, 0.01 * b, 5000 + 2000 * a - 3000 * b + 0.5});
      out << rows.back()[0] << "," << rows.back()[1] << "," << rows.back()[2] << "\n";
      mean_square += std::pow(2000 * a - 3000 * b, 2) / 81;
    }
  }
  out.close();
  WorkerOptions worker = Learner("csv:" + table, Normalize::kAuto);
  worker.model = {.widths = {2, 1}, .loss = Loss::kMse};
  worker.batch_size = 0;
  worker.steps = 5;  // So that there is a loss left.
  const std::string start = cluster.folder.File("start.safetensors");
  const std::vector<float> zeros(2);
  REQUIRE(
      WriteSafetensors(start, {{{"layer0.weight", {1, 2}}, zeros}, {{"layer0.bias", {1}}, std::span(zeros).first(1)}})
          .ok());
  worker.init_weights = start;
  const auto results = cluster.Train(worker, 2);
  REQUIRE(results[0].ok());

  // A model of zeros answers with the mean of the targets.
  double first_loss = 0;
  for (const char* file : {"worker-0.jsonl", "worker-1.jsonl"}) {
    const nlohmann::json first = cluster.Events(file, "step").at(0);
    first_loss += first["loss"].get<double>() * first["samples"].get<double>() / 81;
  }
  CHECK(std::abs(first_loss / mean_square - 1) < 1e-4);

  const nlohmann::json metadata = Metadata(cluster.folder.File("final.safetensors"));
  CHECK(metadata["version"] == "5");
  const std::vector<double> offset = Numbers(metadata, "feature_offset");
  const std::vector<double> scale = Numbers(metadata, "feature_scale");
  const double target_offset = std::stod(metadata["target_offset"].get<std::string>());
  const double target_scale = std::stod(metadata["target_scale"].get<std::string>());
  const auto model = ReadSafetensors(cluster.folder.File("final.safetensors"));
  REQUIRE(model.ok());
  double loss = 0;
  for (const auto& row : rows) {
    double output = (*model)[1].values[0];
    for (size_t k = 0; k < 2; ++k) output += (*model)[0].values[k] * (row[k] - offset[k]) / scale[k];
    loss += std::pow(target_offset + target_scale * output - row[2], 2) / 81;
  }
  CHECK(loss > 1e-3 * mean_square);
  CHECK(loss < 0.1 * mean_square);
  CHECK(std::abs(results[0]->test.loss / loss - 1) < 1e-4);
  CHECK(cluster.Events("worker-0.jsonl", "eval").back()["loss"] == results[0]->test.loss);
}

}  // namespace
}  // namespace ps
