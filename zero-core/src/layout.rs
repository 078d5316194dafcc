//! A model's parameters, and how they are split, reduced and gathered.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use thiserror::Error;

use crate::{Bucket, Bytes, Parameter, ParameterIndex, ParameterSpec, Partition, Rank, Unit, WorldSize};

/// What a [`Layout`] can be told besides the parameters and the world size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayoutOptions {
    /// Shards begin at multiples of this, in elements.
    pub alignment: NonZeroUsize,
    /// The most bytes of f32 gradients that are reduced together; one larger parameter stands alone.
    pub bucket_bytes: Bytes,
    /// Parameters of at most this many elements stay gathered at stage 3; 0 for none. An empty parameter
    /// never counts as persistent: there is nothing to keep.
    pub persistence_threshold: usize,
}

impl Default for LayoutOptions {
    fn default() -> Self {
        Self {
            alignment: NonZeroUsize::MIN,
            bucket_bytes: Bytes::new(4 * 1024 * 1024),
            persistence_threshold: 0,
        }
    }
}

/// Why a [`Layout`] cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A parameter has no name.
    #[error("parameter {} has no name; give every parameter its module path", .index.index())]
    EmptyName {
        /// The position among the specs.
        index: ParameterIndex,
    },
    /// An alias is the empty path.
    #[error("parameter `{name}` has an empty alias; an alias is the module path of a further use")]
    EmptyAlias {
        /// The parameter.
        name: String,
    },
    /// Two parameters claim one path, or one claims it twice.
    #[error(
        "the path `{path}` is claimed by parameter `{first}` and again by parameter `{second}`; state a tied \
         parameter once, with each further path as one alias"
    )]
    Duplicate {
        /// The path, a name or an alias.
        path: String,
        /// The name of the parameter that claimed it first.
        first: String,
        /// The name of the parameter that claimed it again.
        second: String,
    },
    /// The product of a shape does not fit.
    #[error(
        "parameter `{name}` of shape {shape:?} has more than {} elements; check the extents of its shape",
        usize::MAX
    )]
    ShapeOverflow {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The elements of all parameters together do not fit.
    #[error(
        "with parameter `{name}` the model has more than {} elements; check the shapes up to it",
        usize::MAX
    )]
    ModelOverflow {
        /// The parameter at which the sum overflows.
        name: String,
    },
    /// The world is larger than a layout's tables allow.
    #[error(
        "a world of {world} ranks is more than a layout's {}; check the source of that number",
        Layout::MAX_WORLD_SIZE
    )]
    WorldTooLarge {
        /// The world size given.
        world: WorldSize,
    },
}

/// The plan every rank makes alike from the model's parameters: who owns which elements, which gradients are
/// reduced together, which parameters are needed together.
///
/// Frozen parameters are split like all others, but are in no bucket. Tied parameters are one entry with
/// aliases.
///
/// ```
/// use zero_core::{DType, Layout, LayoutOptions, ParameterSpec, Rank, WorldSize};
///
/// let spec = |name: &str, shape: &[usize]| ParameterSpec {
///     name: name.into(),
///     shape: shape.into(),
///     dtype: DType::F32,
///     trainable: true,
///     aliases: vec![],
/// };
/// let specs = vec![spec("fc.weight", &[3, 5]), spec("fc.bias", &[5])];
/// let layout = Layout::new(specs, WorldSize::new(2).unwrap(), LayoutOptions::default())?;
///
/// assert_eq!((layout.shard_numel(Rank::new(0)), layout.shard_numel(Rank::new(1))), (11, 9));
/// assert_eq!(layout.buckets()[0].counts(), [11, 9]);
/// assert_eq!(layout.units()[0].name(), "fc");
/// # Ok::<(), zero_core::LayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    world: WorldSize,
    options: LayoutOptions,
    parameters: Vec<Parameter>,
    paths: HashMap<String, ParameterIndex>,
    buckets: Vec<Bucket>,
    bucket_of: Vec<Option<usize>>,
    units: Vec<Unit>,
    unit_of: Vec<usize>,
}

impl Layout {
    /// The largest world a layout is made for. Buckets have tables of one entry per rank, so a world size
    /// read from a damaged file must not decide how much memory they take.
    pub const MAX_WORLD_SIZE: usize = 1 << 20;

    /// The layout of `specs`, in model order, over `world`.
    ///
    /// # Errors
    ///
    /// A [`LayoutError`] for an empty name or alias, for a path claimed twice, for a shape or a model with
    /// more elements than `usize` counts, and for a world above [`MAX_WORLD_SIZE`](Self::MAX_WORLD_SIZE).
    pub fn new(
        specs: Vec<ParameterSpec>,
        world: WorldSize,
        options: LayoutOptions,
    ) -> Result<Self, LayoutError> {
        if world.get() > Self::MAX_WORLD_SIZE {
            return Err(LayoutError::WorldTooLarge { world });
        }
        let paths = paths(&specs)?;
        let mut total: usize = 0;
        let mut parameters = Vec::with_capacity(specs.len());
        for (position, spec) in specs.into_iter().enumerate() {
            let Some(numel) = product(&spec.shape) else {
                return Err(LayoutError::ShapeOverflow { name: spec.name, shape: spec.shape });
            };
            let Some(sum) = total.checked_add(numel) else {
                return Err(LayoutError::ModelOverflow { name: spec.name });
            };
            total = sum;
            let partition = Partition::new(numel, world).with_alignment(options.alignment);
            let persistent = (1..=options.persistence_threshold).contains(&numel);
            parameters.push(Parameter::new(spec, partition, ParameterIndex::new(position), persistent));
        }

        let buckets = Bucket::of_gradients(&parameters, world, options.bucket_bytes);
        let mut bucket_of = vec![None; parameters.len()];
        for (position, bucket) in buckets.iter().enumerate() {
            bucket.parameters().iter().for_each(|index| bucket_of[index.index()] = Some(position));
        }
        let units = Unit::of_modules(&parameters);
        let mut unit_of = vec![0; parameters.len()];
        for (position, unit) in units.iter().enumerate() {
            unit.parameters().iter().for_each(|index| unit_of[index.index()] = position);
        }
        Ok(Self { world, options, parameters, paths, buckets, bucket_of, units, unit_of })
    }

    /// The number of ranks.
    pub fn world_size(&self) -> WorldSize {
        self.world
    }

    /// The options it was made with.
    pub fn options(&self) -> LayoutOptions {
        self.options
    }

    /// Every parameter, in model order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The parameter at `index`, if there are that many.
    pub fn parameter(&self, index: ParameterIndex) -> Option<&Parameter> {
        self.parameters.get(index.index())
    }

    /// The parameter with the path `name`, be it its name or an alias.
    pub fn find(&self, name: &str) -> Option<&Parameter> {
        self.paths.get(name).and_then(|&index| self.parameter(index))
    }

    /// The buckets, in the order in which backward fills them.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The position in [`buckets`](Self::buckets) of a parameter's bucket. Every trainable parameter has
    /// exactly one, an empty parameter too; `None` if it is frozen or does not exist.
    pub fn bucket_of(&self, parameter: ParameterIndex) -> Option<usize> {
        self.bucket_of.get(parameter.index()).copied().flatten()
    }

    /// The units, in order of their first parameter.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The position in [`units`](Self::units) of a parameter's unit; `None` if the parameter does not exist.
    pub fn unit_of(&self, parameter: ParameterIndex) -> Option<usize> {
        self.unit_of.get(parameter.index()).copied()
    }

    /// The number of elements of the largest unit.
    pub fn largest_unit(&self) -> usize {
        self.units.iter().map(Unit::numel).max().unwrap_or(0)
    }

    /// The number of elements of the model, a tied parameter counted once.
    pub fn numel(&self) -> usize {
        self.parameters.iter().map(Parameter::numel).sum()
    }

    /// The number of elements that have a gradient.
    pub fn trainable_numel(&self) -> usize {
        self.trainable().map(Parameter::numel).sum()
    }

    /// The number of elements `rank` owns.
    pub fn shard_numel(&self, rank: Rank) -> usize {
        self.parameters.iter().map(|parameter| parameter.partition().len(rank)).sum()
    }

    /// The number of elements with a gradient that `rank` owns.
    pub fn trainable_shard_numel(&self, rank: Rank) -> usize {
        self.trainable().map(|parameter| parameter.partition().len(rank)).sum()
    }

    fn trainable(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|parameter| parameter.trainable())
    }
}

/// Every name and alias with the parameter it leads to.
fn paths(specs: &[ParameterSpec]) -> Result<HashMap<String, ParameterIndex>, LayoutError> {
    let mut paths = HashMap::new();
    for (position, spec) in specs.iter().enumerate() {
        let index = ParameterIndex::new(position);
        if spec.name.is_empty() {
            return Err(LayoutError::EmptyName { index });
        }
        if spec.aliases.iter().any(String::is_empty) {
            return Err(LayoutError::EmptyAlias { name: spec.name.clone() });
        }
        for path in std::iter::once(&spec.name).chain(&spec.aliases) {
            if let Some(first) = paths.insert(path.clone(), index) {
                return Err(LayoutError::Duplicate {
                    path: path.clone(),
                    first: specs[first.index()].name.clone(),
                    second: spec.name.clone(),
                });
            }
        }
    }
    Ok(paths)
}

/// The number of elements of a shape. One empty dim makes it zero, however large the others are.
fn product(shape: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1, |product: usize, &extent| product.checked_mul(extent))
}
