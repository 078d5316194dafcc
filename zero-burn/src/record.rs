//! From a checkpoint to a record of Burn.

use std::path::Path;
use std::sync::Arc;

use burn::module::ParamId;
use burn_pack::{Bytes, Error, Tensor, Writer};
use zero_checkpoint::{
    Allow, Checkpoint, LoadOptions, ParameterRecord, Solo, Target, Wanted, WantedParameter,
};
use zero_core::DType;

use crate::ZeroError;
use crate::host::tensor_dtype;

/// Writes the weights of a checkpoint, with elements of `dtype`, to a new file that `Module::load_record` of Burn takes. No
/// engine is needed, and no rank but this one; it holds one parameter at a time.
///
/// ```no_run
/// use std::sync::Arc;
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn::store::ModuleRecord;
/// use burn::tensor::Device;
/// use zero_burn::{Checkpoint, DType, LocalStorage, write_record};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let checkpoint = Checkpoint::open_latest(Arc::new(LocalStorage::new("checkpoints")))?;
/// write_record(checkpoint, "model.bpk", DType::F32)?;
/// let model = LinearConfig::new(8, 4).init(&Device::default());
/// let model = model.load_record(ModuleRecord::load("model.bpk")?);
/// # drop(model);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`ZeroError::Record`] if the file is there or cannot be written, or if the checkpoint's cannot be read.
pub fn write_record(checkpoint: Checkpoint, to: impl AsRef<Path>, dtype: DType) -> Result<(), ZeroError> {
    let checkpoint = Arc::new(checkpoint);
    let parameters = &checkpoint.manifest().parameters;
    let tensors = parameters.iter().enumerate().flat_map(|(index, parameter)| {
        // A tied parameter is there under each of its paths.
        let id = ParamId::new();
        std::iter::once(&parameter.name).chain(&parameter.aliases).map(move |path| (index, id, path))
    });
    let tensors = tensors.map(|(index, id, path)| {
        let parameter = &parameters[index];
        let bytes = parameter.numel() * dtype.size();
        let from = Arc::clone(&checkpoint);
        let read = move || read(&from, &from.manifest().parameters[index], dtype);
        Tensor::deferred(
            path.clone(),
            tensor_dtype(dtype),
            parameter.shape.clone(),
            Some(id.val()),
            bytes,
            read,
        )
    });
    let to = to.as_ref();
    let written = Writer::new(tensors.collect()).overwrite(false).auto_extension(false).write_to_file(to);
    written.map_err(|error| ZeroError::Record { path: to.to_path_buf(), reason: error.to_string() })
}

/// All elements of a parameter.
fn read(checkpoint: &Checkpoint, parameter: &ParameterRecord, dtype: DType) -> Result<Bytes, Error> {
    let mut bytes = vec![0; parameter.numel() * dtype.size()];
    let wanted = WantedParameter {
        spec: parameter.spec(),
        layout: parameter.layout,
        range: 0..parameter.numel(),
        values: Target::bytes(dtype, &mut bytes),
        states: Vec::new(),
    };
    let allow = Allow { unexpected: true, dtype: true, ..Allow::default() };
    let options = LoadOptions { allow, optimizer: false, ..LoadOptions::default() };
    let loaded = checkpoint.load(Wanted { parameters: vec![wanted] }, &options, &Solo);
    loaded.map_err(|error| Error::IoError(error.to_string()))?;
    Ok(Bytes::from_bytes_vec(bytes))
}
