//! Divides NICs among GPUs that are equally near to them.

use super::Distance;

/// A GPU and the NICs nearest to it, by index, in order.
pub(super) struct Demand {
    pub nearest: Vec<usize>,
    pub distance: Distance,
}

#[derive(Clone, Default)]
pub(super) struct Share {
    pub rails: Vec<usize>,
    /// Number of GPUs that share the same candidate NICs.
    pub gpus: usize,
    /// Number of NICs for them.
    pub of: usize,
}

/// GPUs with the same candidate NICs get equally many, because collectives run at the pace of the
/// slowest. If there are fewer NICs than GPUs, neighbours share one: PCI addresses follow the
/// switches, even where a guest does not see them. GPUs nearer to their NICs choose first. NICs
/// with more `uses` are chosen last.
pub(super) fn share(demands: &[Demand], uses: &mut [usize], most: usize) -> Vec<Share> {
    let mut shares = vec![Share::default(); demands.len()];
    let mut order: Vec<usize> = (0..demands.len()).collect();
    order.sort_by_key(|i| demands[*i].distance.rank());
    let mut served = vec![false; demands.len()];
    for first in order {
        if served[first] || demands[first].nearest.is_empty() {
            continue;
        }
        let (nearest, rank) = (&demands[first].nearest, demands[first].distance.rank());
        let same =
            |i: &usize| demands[*i].nearest == *nearest && demands[*i].distance.rank() == rank;
        let group: Vec<usize> = (0..demands.len()).filter(same).collect();
        let least = nearest.iter().map(|nic| uses[*nic]).min().unwrap_or(0);
        let pool: Vec<usize> = nearest.iter().copied().filter(|nic| uses[*nic] == least).collect();
        for (k, gpu) in group.iter().enumerate() {
            served[*gpu] = true;
            let step = pool.len() / group.len();
            let rails = match step {
                0 => vec![pool[k * pool.len() / group.len()]],
                _ => spread(&pool[k * step..][..step], most),
            };
            rails.iter().for_each(|nic| uses[*nic] += 1);
            shares[*gpu] = Share { rails, gpus: group.len(), of: pool.len() };
        }
    }
    shares
}

/// At most `most` of them, spread evenly, because neighbours may share a switch.
pub(super) fn spread(nics: &[usize], most: usize) -> Vec<usize> {
    let n = nics.len().min(most);
    (0..n).map(|i| nics[i * nics.len() / n]).collect()
}
