#include "worker/model/cpu_loss.h"

#include <algorithm>
#include <cmath>

namespace ps {
namespace {

// Each writes the gradient of one sample's loss times `scale` to dz (unless it is null), and returns the loss.

// The largest output is taken off first, so that no exponential overflows.
double SoftmaxCrossEntropy(const float* z, int32_t label, float* dz, int64_t classes, float scale) {
  const float largest = *std::max_element(z, z + classes);
  float sum = 0;
  for (int64_t k = 0; k < classes; ++k) sum += std::exp(z[k] - largest);
  if (dz != nullptr) {
    for (int64_t k = 0; k < classes; ++k) {
      dz[k] = scale * (std::exp(z[k] - largest) / sum - (k == label ? 1.0F : 0.0F));
    }
  }
  return std::log(static_cast<double>(sum)) - (static_cast<double>(z[label]) - static_cast<double>(largest));
}

// −y·log σ(z) − (1−y)·log(1−σ(z)) = max(z, 0) − z·y + log(1 + e^−|z|)
double SigmoidCrossEntropy(const float* z, int32_t label, float* dz, int64_t classes, float scale) {
  double loss = 0;
  for (int64_t k = 0; k < classes; ++k) {
    const float y = k == label ? 1.0F : 0.0F;
    const float e = std::exp(-std::abs(z[k]));
    loss += static_cast<double>(std::max(z[k], 0.0F)) - static_cast<double>(z[k]) * static_cast<double>(y) +
            static_cast<double>(std::log1p(e));
    if (dz != nullptr) dz[k] = scale * ((z[k] >= 0 ? 1.0F / (1.0F + e) : e / (1.0F + e)) - y);
  }
  return loss;
}

double MeanSquaredError(const float* z, int32_t label, float* dz, int64_t classes, float scale) {
  double loss = 0;
  for (int64_t k = 0; k < classes; ++k) {
    const float error = z[k] - (k == label ? 1.0F : 0.0F);
    loss += static_cast<double>(error) * static_cast<double>(error);
    if (dz != nullptr) dz[k] = scale * 2.0F * error / static_cast<float>(classes);
  }
  return loss / static_cast<double>(classes);
}

// Whether the label's output is the largest, and the first of equal ones. What is not a number compares with nothing.
bool IsCorrect(const float* z, int32_t label, int64_t classes) {
  for (int64_t k = 0; k < classes; ++k) {
    if (!(k < label ? z[k] < z[label] : z[k] <= z[label])) return false;
  }
  return true;
}

}  // namespace

LossSums CpuLossAndGradient(Loss loss, const float* outputs, const int32_t* labels, float* d_outputs, int64_t batch,
                            int64_t classes) {
  LossSums sums;
  const float scale = 1.0F / static_cast<float>(batch);
  for (int64_t sample = 0; sample < batch; ++sample) {
    const float* z = outputs + sample * classes;
    float* dz = d_outputs == nullptr ? nullptr : d_outputs + sample * classes;
    const int32_t label = labels[sample];
    switch (loss) {
      case Loss::kSoftmaxCrossEntropy:
        sums.loss += SoftmaxCrossEntropy(z, label, dz, classes, scale);
        break;
      case Loss::kSigmoidCrossEntropy:
        sums.loss += SigmoidCrossEntropy(z, label, dz, classes, scale);
        break;
      case Loss::kMse:
        sums.loss += MeanSquaredError(z, label, dz, classes, scale);
        break;
    }
    sums.correct += IsCorrect(z, label, classes) ? 1 : 0;
  }
  return sums;
}

LossSums CpuSquaredError(const float* outputs, const float* targets, float* d_outputs, int64_t batch) {
  LossSums sums;
  const float scale = 1.0F / static_cast<float>(batch);
  for (int64_t sample = 0; sample < batch; ++sample) {
    const float error = outputs[sample] - targets[sample];
    sums.loss += static_cast<double>(error) * static_cast<double>(error);
    if (d_outputs != nullptr) d_outputs[sample] = scale * 2.0F * error;
  }
  return sums;
}

}  // namespace ps
