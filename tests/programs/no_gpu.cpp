// A CUDA device without kernels: answers what PyTorch asks of a device when fake tensors say "cuda".
// Load the library before importing torch, whose hooks it replaces; then call install().
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

// What PyTorch asks of any accelerator, such as for the streams of the autograd engine and of torch.Stream.
// There is one device with one stream, on which everything has happened.
struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getNewStream(Device, int) const override { return getStream(getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override { *event = event; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

struct Hooks : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
};

namespace at {
C10_REGISTER_TYPED_CREATOR_WITH_PRIORITY(
    CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, RegistererCUDAHooksRegistry::DefaultCreator<::Hooks>)
}

extern "C" void install() {
  auto& guards = c10::impl::device_guard_impl_registry;
  guards[static_cast<size_t>(DeviceType::CUDA)].store(new Guard);
}
