//! Kernels in PTX, run by the pool: what the handlers' own tests cannot see.

mod async_copy;
mod basics;
mod checked;
mod digest;
mod divergence;
mod dots;
mod instructions;
mod isa;
mod loads;
mod matrix;
mod memory;
mod pairs;
mod sparse;
mod stack;
mod strips;
mod tensor;

use crate::check::{Check, Checker};
use crate::code::{PlaceKind, Placement, Program};
use crate::exec::Level;
use crate::exec::texture::TextureView;
use crate::launch::{GridSpec, Services};
use crate::memory::Spans;
use crate::{Fault, Pool, lower};
use kedge_cuda_types::CuError;
use kedge_protocol::OutputTarget;
use std::sync::{Arc, Mutex, mpsc};

/// A device without devices: memory is this process's own.
pub(crate) struct Bench {
    pub pool: Arc<Pool>,
    pub spans: Arc<Spans>,
    pub printed: Arc<Printed>,
}

#[derive(Default)]
pub(crate) struct Printed(pub Mutex<Vec<u8>>);

impl Services for Printed {
    fn print(&self, _: OutputTarget, bytes: &[u8]) {
        self.0.lock().unwrap().extend_from_slice(bytes);
    }
    fn malloc(&self, _: u64) -> u64 {
        0
    }
    fn free(&self, _: u64) -> bool {
        false
    }
    fn texture(&self, _: u64) -> Option<Arc<TextureView>> {
        None
    }
}

struct Leaked(Arc<Spans>);

impl Placement for Leaked {
    fn place(&mut self, _: &str, size: u64, align: u64, _: PlaceKind) -> Result<u64, CuError> {
        let bytes = vec![0u8; (size + align) as usize].leak();
        let addr = (bytes.as_ptr() as u64).next_multiple_of(align);
        self.0.insert(addr, size);
        Ok(addr)
    }
}

/// What a launch needs besides the kernel.
#[derive(Clone)]
pub(crate) struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub cluster: [u32; 3],
    pub shared: u32,
    pub cooperative: bool,
}

impl Shape {
    pub(crate) fn new(grid: u32, block: u32) -> Shape {
        Shape {
            grid: [grid, 1, 1],
            block: [block, 1, 1],
            cluster: [1; 3],
            shared: 0,
            cooperative: false,
        }
    }
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench {
            pool: Pool::new(2).unwrap(),
            spans: Arc::new(Spans::new()),
            printed: Arc::new(Printed::default()),
        }
    }

    pub(crate) fn program(&self, body: &str, level: Level) -> Arc<Program> {
        self.program_for(body, level, None)
    }

    pub(crate) fn program_for(
        &self,
        body: &str,
        level: Level,
        checker: Option<Arc<Checker>>,
    ) -> Arc<Program> {
        let text = format!(".version 8.5\n.target sm_90\n.address_size 64\n{body}");
        let module = kedge_ptx::parse(&text).unwrap();
        let mut placement = Leaked(self.spans.clone());
        Arc::new(lower::build_checked(&module, &mut placement, level, checker).unwrap())
    }

    /// Makes `data` valid device memory.
    pub(crate) fn map<T>(&self, data: &mut [T]) -> u64 {
        self.spans.insert(data.as_ptr() as u64, size_of_val(data) as u64);
        data.as_mut_ptr() as u64
    }

    /// Runs the program's first kernel with 64-bit parameters.
    pub(crate) fn run(
        &self,
        program: &Arc<Program>,
        shape: &Shape,
        params: &[u64],
    ) -> Result<(), Fault> {
        let (send, receive) = mpsc::channel();
        let spec = GridSpec {
            program: program.clone(),
            kernel: 0,
            grid: shape.grid,
            block: shape.block,
            cluster: shape.cluster,
            shared_bytes: shape.shared,
            cooperative: shape.cooperative,
            params: params.iter().flat_map(|p| p.to_le_bytes()).collect(),
            stack_limit: 1024,
            spans: self.spans.clone(),
            services: self.printed.clone(),
        };
        self.pool.launch(spec, Box::new(move |result| send.send(result).unwrap()));
        receive.recv_timeout(std::time::Duration::from_secs(60)).expect("the grid never ends")
    }

    /// Runs `body`'s kernel over `data` as its first parameter at every level of this machine, each
    /// time from the same data, and once more checked; the results must agree.
    pub(crate) fn transform<T: Clone + PartialEq + std::fmt::Debug>(
        &self,
        body: &str,
        shape: &Shape,
        data: &[T],
    ) -> Vec<T> {
        let levels = [Level::Portable, Level::Avx2, Level::Avx512];
        let mut result: Option<Vec<T>> = None;
        let levels = levels.into_iter().filter(|&level| level <= Level::detect());
        let all = Check { races: true, init: true, unused: true };
        let checker = Arc::new(Checker::new(all, 1).unwrap());
        let plain = levels.map(|level| (level, None));
        for (level, checker) in plain.chain([(Level::detect(), Some(checker))]) {
            let mut data = data.to_vec();
            let addr = self.map(&mut data);
            let program = self.program_for(body, level, checker);
            assert_eq!(program.kernels[0].unsupported, None);
            self.run(&program, shape, &[addr]).unwrap();
            self.spans.remove(addr, size_of_val(data.as_slice()) as u64);
            if let Some(other) = &result {
                assert_eq!(&data, other, "{level:?} differs");
            }
            result = Some(data);
        }
        result.unwrap()
    }
}
