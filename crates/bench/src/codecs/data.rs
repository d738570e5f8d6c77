//! What is checkpointed: CRUM's two vectors of random numbers, and stand-ins for the memory of the
//! two applications of its Table III.

/// A set of data of the published tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Set {
    Random,
    HalfRandom,
    Multigrid,
    Sparse,
}

impl Set {
    pub(super) const ALL: [Set; 4] = [Set::Random, Set::HalfRandom, Set::Multigrid, Set::Sparse];

    pub(super) fn name(self) -> &'static str {
        match self {
            Set::Random => "100 % random",
            Set::HalfRandom => "50 % random",
            Set::Multigrid => "multigrid",
            Set::Sparse => "sparse matrix",
        }
    }

    pub(super) fn by_name(name: &str) -> Option<Set> {
        Set::ALL.into_iter().find(|set| set.name() == name)
    }

    /// Whether its times are told beside the naive way's, as in Table III.
    pub(super) fn is_relative(self) -> bool {
        matches!(self, Set::Multigrid | Set::Sparse)
    }
}

/// Bytes to be checkpointed.
pub(super) struct Data {
    pub(super) set: Set,
    pub(super) bytes: Vec<u8>,
}

impl Data {
    /// Returns data of about so many bytes.
    pub(super) fn new(set: Set, size: usize) -> Data {
        let bytes = match set {
            Set::Random => random(size, 100),
            Set::HalfRandom => random(size, 50),
            Set::Multigrid => multigrid(size),
            Set::Sparse => sparse(size),
        };
        Data { set, bytes }
    }
}

/// A page, of which memory is made.
const PAGE: usize = 4096;

/// Two vectors of 32-bit floats: a part of each random, the rest one number, as in CRUM's Table II.
fn random(size: usize, percent: usize) -> Vec<u8> {
    let mut state = 0x5eed_u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let elements = size / 2 / size_of::<f32>();
    let mut bytes = Vec::with_capacity(size + PAGE);
    for _ in 0..2 {
        for at in 0..elements {
            let value = if at < elements / 100 * percent { random() } else { 0.25 };
            bytes.extend(value.to_le_bytes());
        }
    }
    whole_pages(bytes)
}

fn whole_pages(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
    bytes
}

/// The arrays of a geometric multigrid solver in the middle of a solution, as HPGMG-FV has them: on
/// every level the solution, right-hand side, residual and scratch, and the coefficients.
fn multigrid(size: usize) -> Vec<u8> {
    const ARRAYS: usize = 9;
    // Coarser levels add a seventh.
    let points = size / size_of::<f64>() / ARRAYS * 7 / 8;
    let mut side = ((points as f64).cbrt() as usize).max(8);
    let mut bytes = Vec::with_capacity(size + PAGE);
    while side >= 4 {
        level(side, &mut bytes);
        side /= 2;
    }
    whole_pages(bytes)
}

fn level(side: usize, bytes: &mut Vec<u8>) {
    let h = 1.0 / (side - 1) as f64;
    let at = |x: usize, y: usize, z: usize| (z * side + y) * side + x;
    let wave = |x: usize| (std::f64::consts::PI * x as f64 * h).sin();
    let mut right = vec![0.0; side * side * side];
    let (mut solution, mut scratch) = (right.clone(), right.clone());
    let mut residual = right.clone();
    for (z, y, x) in inside(side) {
        right[at(x, y, z)] = 3.0 * std::f64::consts::PI.powi(2) * wave(x) * wave(y) * wave(z);
    }
    for _ in 0..SWEEPS {
        for (z, y, x) in inside(side) {
            let here = at(x, y, z);
            let around = solution[here - 1]
                + solution[here + 1]
                + solution[here - side]
                + solution[here + side]
                + solution[here - side * side]
                + solution[here + side * side];
            residual[here] = right[here] - (6.0 * solution[here] - around) / (h * h);
            scratch[here] = solution[here] + residual[here] * h * h / 6.0 * 0.8;
        }
        std::mem::swap(&mut solution, &mut scratch);
    }
    let constant = |value: f64| vec![value; side * side * side];
    let coefficients = [1.0, 1.0, 1.0, 0.0, h * h / 6.0].map(constant);
    for array in [right, solution, scratch, residual].iter().chain(&coefficients) {
        bytes.extend(array.iter().flat_map(|value| value.to_le_bytes()));
    }
}

/// Jacobi sweeps of each level.
const SWEEPS: usize = 4;

fn inside(side: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let range = move || 1..side - 1;
    range().flat_map(move |z| range().flat_map(move |y| range().map(move |x| (z, y, x))))
}

/// A seven-point matrix in compressed rows and the vectors of a conjugate-gradient solver, as HYPRE
/// has them.
fn sparse(size: usize) -> Vec<u8> {
    /// Seven values and columns, a row's begin and five vectors.
    const ROW: usize = 7 * 12 + 4 + 5 * 8;
    let side = ((size / ROW) as f64).cbrt() as i64;
    let rows = side * side * side;
    let (mut values, mut columns, mut begins) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..rows {
        begins.push(columns.len() as i32);
        for step in [-side * side, -side, -1, 0, 1, side, side * side] {
            if (0..rows).contains(&(row + step)) {
                columns.push((row + step) as i32);
                values.push(if step == 0 { 6.0 } else { -1.0_f64 });
            }
        }
    }
    let mut bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    bytes.extend(columns.iter().chain(&begins).flat_map(|index| index.to_le_bytes()));
    for vector in 1..=5 {
        let value = |row: i64| ((row * vector) as f64 / rows as f64).sin();
        bytes.extend((0..rows).flat_map(|row| value(row).to_le_bytes()));
    }
    whole_pages(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_are_about_as_large_as_asked() {
        let size = 8 << 20;
        for Data { set, bytes } in Set::ALL.map(|set| Data::new(set, size)) {
            let length = bytes.len();
            assert!(length % PAGE == 0 && length > size / 2 && length < size * 2, "{set:?}");
            assert_eq!(Set::by_name(set.name()), Some(set));
        }
        assert_eq!(Set::by_name("other"), None);
    }

    #[test]
    fn half_of_half_random_data_is_one_number() {
        let bytes = random(1 << 20, 50);
        let (words, _) = bytes.as_chunks::<4>();
        let same = words.iter().filter(|word| **word == 0.25_f32.to_le_bytes()).count();
        assert!((words.len() * 49 / 100..words.len() * 51 / 100).contains(&same));
    }
}
