// A CUDA device without kernels: answers what PyTorch asks of a device when fake tensors say "cuda".
// Load the library before importing torch, whose hooks it replaces; then call install().
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

// The autograd engine starts a thread for the device and asks for its stream: one device, one stream.
struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
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
