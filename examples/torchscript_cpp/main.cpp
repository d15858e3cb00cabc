// SPDX-License-Identifier: Apache-2.0
// A converted model without Python: loads torchq's ops and a TorchScript archive, runs it on a
// tensor, and writes the result.
//
//   run libtorchq.so model.pt input.pt output.pt
//
// input.pt is a tensor written by torch.save; output.pt is one that torch.load reads.
#include <dlfcn.h>
#include <torch/script.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

/// Registers torchq's ops with the dispatcher: the library does so when it is loaded.
void load_ops(std::string library) {
  // dlopen looks for a name without a slash in the system's folders only.
  if (std::filesystem::exists(library)) library = std::filesystem::absolute(library);
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr)
    throw std::runtime_error(dlerror());
}

double milliseconds(torch::jit::Module& model, const std::vector<torch::jit::IValue>& inputs) {
  std::vector<double> times;
  for (int i = 0; i < 11; ++i) {
    const auto start = std::chrono::steady_clock::now();
    model.forward(inputs);
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - start;
    times.push_back(elapsed.count());
  }
  std::nth_element(times.begin(), times.begin() + 5, times.end());
  return times[5];
}

int run(char** argv) {
  load_ops(argv[1]);
  torch::jit::Module model = torch::jit::load(argv[2]);
  model.eval();
  model = torch::jit::freeze(model);
  const c10::InferenceMode inference;
  const std::vector<torch::jit::IValue> inputs = {
      torch::jit::pickle_load(read(argv[3])).toTensor()};
  const at::Tensor output = model.forward(inputs).toTensor();
  write(argv[4], torch::jit::pickle_save(output));
  std::printf("%.3f ms\n", milliseconds(model, inputs));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s libtorchq.so model.pt input.pt output.pt\n", argv[0]);
    return 2;
  }
  try {
    return run(argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
}
