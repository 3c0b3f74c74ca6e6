// A CUDA build of torch and torch_npu both claim the keys of the allocator's configuration, and the second claim
// ends the process ("Duplicated key"). Nothing here allocates on CUDA: give the keys free before torch_npu comes.
#include <c10/core/AllocatorConfig.h>

#include <string>
#include <unordered_set>

extern "C" void cann_stub_unclaim_allocator_keys() {
  const auto& keys = c10::CachingAllocator::AcceleratorAllocatorConfig::getKeys();
  const_cast<std::unordered_set<std::string>&>(keys).clear();
}
