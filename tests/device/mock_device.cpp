// A device of torch that is not the CPU and runs on it: its own device type (PrivateUse1), CPU kernels, and counts.
//
// Host tensors of one or more dimensions are refused beside device tensors, as CUDA refuses them; host indices of device tensors
// pass, as they do there. `observe` names a function that is called at every transfer and at everything that would make the
// host wait for a device that works on its own; the copies that the fallback to CPU kernels makes are not among them.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <chrono>
#include <set>

namespace py = pybind11;

namespace {

constexpr auto kMock = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kMock, 0);

// --- what is counted ----------------------------------------------------------------------------------------------

py::object observer = py::none();
thread_local bool in_fallback = false;

void seen(const char* kind) {
  if (in_fallback || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (!observer.is_none()) observer(kind);
}

// --- memory -------------------------------------------------------------------------------------------------------

struct MockAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes == 0 ? nullptr : std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return {memory, memory, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
MockAllocator allocator;
REGISTER_ALLOCATOR(kMock, &allocator);

// Page-locked memory is ordinary memory here, whose addresses are known.
std::set<const void*> pinned;
std::mutex pinned_lock;

void unpin(void* memory) {
  std::lock_guard<std::mutex> lock(pinned_lock);
  pinned.erase(memory);
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
    std::lock_guard<std::mutex> lock(pinned_lock);
    pinned.insert(memory);
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

// --- one device, one stream ---------------------------------------------------------------------------------------

struct MockGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kMock;
  c10::DeviceType type() const override { return kMock; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device) const override { return getStream(kDevice); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(kDevice); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { seen("wait"); }
  void synchronizeDevice(c10::DeviceIndex) const override { seen("wait"); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new std::chrono::steady_clock::time_point;
    *static_cast<std::chrono::steady_clock::time_point*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { seen("wait"); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<std::chrono::steady_clock::time_point*>(event);
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    auto at = [](void* event) { return *static_cast<std::chrono::steady_clock::time_point*>(event); };
    return std::chrono::duration<double, std::milli>(at(end) - at(start)).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, MockGuard);

struct MockHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard<std::mutex> lock(pinned_lock);
    return pinned.count(memory) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* mutable_storage = storage.unsafeGetStorageImpl();
    auto memory = allocator.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
    mutable_storage->set_data_ptr_noswap(std::move(memory));
    mutable_storage->set_nbytes(bytes);
  }
};
MockHooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// --- kernels ------------------------------------------------------------------------------------------------------

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto options = tensor.options().device(c10::kCPU);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  // From pinned memory the host goes on; a copy to the host waits unless it was asked not to.
  if (from.is_cpu() && !to.is_cpu()) {
    seen(non_blocking && from.is_pinned() ? "in, not waited for" : "in");
  } else if (to.is_cpu() && !from.is_cpu()) {
    seen(non_blocking ? "out, not waited for" : "out");
  }
  at::NoGradGuard no_grad;
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& tensor) {
  seen("out");
  return on_host(tensor).item();
}

const at::Tensor& resize(const at::Tensor& tensor, at::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(storage));
  implementation->set_storage_offset(offset);
  implementation->set_sizes_and_strides(size, stride);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  auto length = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_storage(tensor, std::move(storage), 0, {length}, {1});
}

// Operations whose result's shape or whose answer depends on values, for which CUDA makes the host wait.
const std::set<std::string> kWaits = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
                                      "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
                                      "aten::repeat_interleave"};
const std::set<std::string> kIndexing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

struct Arguments {
  bool device = false, mask = false;
  std::string host;
  void add(const at::Tensor& tensor, const std::string& name, bool index) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == kMock) {
      device = true;
    } else if (tensor.dim() > 0) {
      host = name;
    }
    mask = mask || (index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte));
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const bool indexes = kIndexing.count(schema.name()) > 0;
  Arguments arguments;
  for (size_t place = 0; place < count; ++place) {
    const auto& value = (*stack)[stack->size() - count + place];
    const auto& name = schema.arguments()[place].name();
    const bool index = indexes && name == "indices";
    if (value.isTensor()) {
      arguments.add(value.toTensor(), name, index);
    } else if (value.isList()) {
      for (const c10::IValue& each : value.toListRef())
        if (each.isTensor()) arguments.add(each.toTensor(), name, index);
    }
  }
  TORCH_CHECK(!arguments.device || arguments.host.empty() || indexes, "Expected all tensors to be on the same device in ",
              schema.name(), ": argument ", arguments.host, " is on the CPU");
  if (kWaits.count(schema.name()) > 0 || arguments.mask) seen("wait");
  if (arguments.device && !arguments.host.empty()) seen("in");  // host indices, which are copied to the device
  const bool outer = in_fallback;
  in_fallback = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_fallback = outer;
    throw;
  }
  in_fallback = outer;
}

// Devices other than the CPU run a step of a GRU as one kernel, which the CPU lacks: this is the CPU's, operation by operation.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hidden,
                                            const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  for (const auto& bias : {input_bias, hidden_bias}) TORCH_CHECK(!bias || !bias->defined(), "the mock device's GRU has no bias");
  const auto inputs = input_gates.chunk(3, 1), hiddens = hidden_gates.chunk(3, 1);
  const auto reset = hiddens[0].add(inputs[0]).sigmoid(), keep = hiddens[1].add(inputs[1]).sigmoid();
  const auto fresh = inputs[2].add(hiddens[2].mul(reset)).tanh();
  return {(hidden - fresh).mul(keep).add(fresh), at::Tensor()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_UNLESS_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_UNLESS_SET)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("observe", [](py::object function) { observer = std::move(function); });
}
