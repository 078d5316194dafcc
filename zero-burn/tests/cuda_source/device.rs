//! A device that runs nothing: what is launched on it is rendered as CUDA C++ and kept. That is what `cubecl-cuda` does with
//! its feature `cpp`; without it, LLVM makes PTX of the same definitions.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::client::Client;
use cubecl::dry_run::LaunchMode;
use cubecl::future::{DynFut, block_on};
use cubecl::ir::{
    ContiguousElements, DeviceIdentity, DeviceProperties, HardwareProperties, MemoryDeviceProperties,
    MmaProperties, TargetProperties, VectorSize,
};
use cubecl::prelude::{CubeCount, CubeKernel};
use cubecl::{Compiler, define_kernel};
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId};
use cubecl_common::profile::{ProfileDuration, TimingMethod};
use cubecl_cpp::cuda::mma::manual::contiguous_elements_cuda;
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::target::Cuda;
use cubecl_environment::backtrace::BackTrace;
use cubecl_environment::stream::StreamId;
use cubecl_server::allocator::ContiguousMemoryLayoutPolicy;
use cubecl_server::logging::ServerLogger;
use cubecl_server::memory_management::{ManagedMemoryHandle, MemoryAllocationMode, StreamMemoryReport};
use cubecl_server::server::{
    BufferBinding, CopyDescriptor, IoError, KernelArguments, ProfileError, ProfilingToken, Server,
    ServerCommunication, ServerError, ServerStorage, ServerUtilities,
};
use cubecl_server::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId};

/// Every byte that is read from a device, by the device.
pub(crate) type Memory = fn(usize) -> Vec<u8>;

/// What has been launched on a device: the kernels' names, by their sources.
type Rendered = BTreeMap<String, &'static str>;

static DEVICES: Mutex<BTreeMap<u16, State>> = Mutex::new(BTreeMap::new());

struct State {
    memory: Memory,
    rendered: Rendered,
}

fn with<T>(device: u16, f: impl FnOnce(&mut State) -> T) -> T {
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    f(devices.get_mut(&device).expect("a device is made before it is used"))
}

/// Lets `work` launch on a device of its own, and returns what it has launched. A device is used once.
pub(crate) fn render(device: u16, memory: Memory, work: impl FnOnce(&Client)) -> Rendered {
    let state = State { memory, rendered: BTreeMap::new() };
    let old = DEVICES.lock().unwrap_or_else(PoisonError::into_inner).insert(device, state);
    assert!(old.is_none(), "device {device} is another test's");
    let client = Client::load::<Renderer>(DeviceId { type_id: 0, index_id: device });
    work(&client);
    block_on(client.sync()).expect("nothing of this device can fail");
    with(device, |state| std::mem::take(&mut state.rendered))
}

/// The features of compute capability 8.0 that a kernel may ask for.
fn properties() -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 166_912,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(108),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity =
        DeviceIdentity { name: "CUDA C++".to_owned(), fingerprint: "ptx_sm80".to_owned(), physical: None };
    let memory = MemoryDeviceProperties::new(1 << 30, 512);
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System, identity);
    register_supported_types(&mut properties);
    properties
}

fn options() -> CompilationOptions {
    let supports_features =
        CppSupportedFeatures { fast_math: true, dp4a: true, grid_constants: true, ..Default::default() };
    CompilationOptions { supports_features, ..Default::default() }
}

#[derive(Debug)]
struct Renderer {
    device: u16,
    utilities: Arc<ServerUtilities>,
}

impl DeviceService for Renderer {
    fn init(device: DeviceId) -> Self {
        let mma = MmaProperties {
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
            ..Default::default()
        };
        let (utilities, _) = ServerUtilities::init(
            ServiceId::of::<Self>(device),
            "cuda",
            properties(),
            TargetProperties { mma },
            Arc::new(ServerLogger::default()),
            ContiguousMemoryLayoutPolicy::new(512),
        );
        Self { device: device.index_id, utilities: Arc::new(utilities) }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        let utilities: Arc<dyn Any + Send + Sync> = self.utilities.clone();
        utilities
    }
}

impl ServerCommunication for Renderer {}

impl Server for Renderer {
    fn initialize_memory(&mut self, _: ManagedMemoryHandle, _: u64, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(
        &mut self,
        descriptors: Vec<CopyDescriptor>,
        _: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let memory = with(self.device, |state| state.memory);
        let read = |descriptor: &CopyDescriptor| {
            Bytes::from_bytes_vec(memory(descriptor.handle.size_in_used() as usize))
        };
        let bytes = descriptors.iter().map(read).collect();
        Box::pin(async move { Ok(bytes) })
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: Vec<BufferBinding>, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn check(&mut self, _: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        _: CubeCount,
        _: KernelArguments,
        _: StreamId,
        _: LaunchMode,
    ) {
        let name = kernel.name();
        let definition =
            define_kernel(&*kernel).unwrap_or_else(|error| panic!("{name} cannot be defined: {error:?}"));
        let source = CppCompiler::<Cuda>::default()
            .compile(definition, &options())
            .unwrap_or_else(|error| panic!("{name} cannot be rendered: {error:?}"));
        with(self.device, |state| state.rendered.insert(source.to_string(), name));
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Ok(ProfilingToken { id: 0 })
    }

    fn end_profile(&mut self, _: StreamId, _: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered { backtrace: BackTrace::capture() })
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

/// There is none.
struct NoStorage;

impl ComputeStorage for NoStorage {
    type Resource = ();

    fn alignment(&self) -> usize {
        512
    }

    fn get(&mut self, _: &StorageHandle) -> Result<(), IoError> {
        Ok(())
    }

    fn alloc(&mut self, _: u64) -> Result<StorageHandle, IoError> {
        Err(IoError::UnsupportedIoOperation { backtrace: BackTrace::capture() })
    }

    fn dealloc(&mut self, _: StorageId) {}

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        0
    }
}

impl ServerStorage for Renderer {
    type Storage = NoStorage;

    fn get_resource(
        &mut self,
        binding: BufferBinding,
        _: StreamId,
    ) -> Result<ManagedResource<()>, ServerError> {
        Ok(ManagedResource::new(binding.memory, ()))
    }
}
