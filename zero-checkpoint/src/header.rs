//! The beginning of a safetensors file.

use serde_json::Value;
use zero_core::DType;

/// A tensor of a file that is to be written.
#[derive(Clone, Debug)]
pub(crate) struct HeaderTensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// The length of its data.
    pub(crate) bytes: u64,
}

/// All bytes before the data of these tensors, which follow each other in this order. A multiple of 8, so that readers can
/// view the data in place.
pub(crate) fn header<'t>(
    metadata: &[(String, String)],
    tensors: impl IntoIterator<Item = &'t HeaderTensor>,
) -> Vec<u8> {
    let json = |text: &str| Value::from(text).to_string();
    let pairs: Vec<_> =
        metadata.iter().map(|(key, value)| format!("{}:{}", json(key), json(value))).collect();
    let mut members = vec![format!(r#""__metadata__":{{{}}}"#, pairs.join(","))];
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes;
        members.push(format!(
            r#"{}:{{"dtype":"{}","shape":{:?},"data_offsets":[{at},{end}]}}"#,
            json(&tensor.name),
            tensor.dtype.name().to_uppercase(),
            tensor.shape
        ));
        at = end;
    }
    let mut text = format!("{{{}}}", members.join(",")).into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}
