use fabric_engine as fe;
use pyo3::{exceptions::PyTypeError, prelude::*};

use super::{
    memory::Region,
    peers::Peer,
    values::{EngineAddress, SegmentDescriptor},
};

/// One address space over regions of this engine: host memory, GPU memory and files alike.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct Segment(pub fe::Segment);

#[pymethods]
impl Segment {
    /// Bytes, from offset 0 to the end of the last part.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.descriptor().len()
    }

    /// The parts' regions, in order.
    #[getter]
    fn regions(&self) -> Vec<Region> {
        self.0.regions().iter().cloned().map(Region).collect()
    }

    /// The descriptor with which a peer opens the segment.
    fn descriptor(&self) -> SegmentDescriptor {
        SegmentDescriptor(self.0.descriptor().clone())
    }

    fn __len__(&self) -> usize {
        self.nbytes() as usize
    }

    fn __repr__(&self) -> String {
        format!("Segment({} bytes in {} parts)", self.nbytes(), self.0.regions().len())
    }
}

/// A peer's segment, ready to be named in requests.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct RemoteSegment(pub fe::RemoteSegment);

#[pymethods]
impl RemoteSegment {
    /// Bytes, from offset 0 to the end of the last part.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.descriptor().len()
    }

    #[getter]
    fn peer(&self) -> Peer {
        Peer(self.0.peer().clone())
    }

    fn __len__(&self) -> usize {
        self.nbytes() as usize
    }

    fn __repr__(&self) -> String {
        let owner = EngineAddress(self.0.peer().address().clone());
        format!("RemoteSegment({} bytes of {})", self.nbytes(), owner.0.label())
    }
}

/// Regions, each at the end of the one before it unless it brings its offset.
pub fn parts(given: &[Bound<'_, PyAny>]) -> PyResult<Vec<(u64, fe::Region)>> {
    let (mut parts, mut end) = (Vec::new(), 0u64);
    for part in given {
        let (at, region) = match part.cast::<Region>() {
            Ok(region) => (end, region.get().0.clone()),
            Err(_) => {
                let Ok((at, region)) = part.extract::<(u64, PyRef<'_, Region>)>() else {
                    return Err(PyTypeError::new_err(
                        "a segment is made of regions, or of pairs of an offset and a region",
                    ));
                };
                (at, region.0.clone())
            }
        };
        end = at.saturating_add(region.len());
        parts.push((at, region));
    }
    Ok(parts)
}
