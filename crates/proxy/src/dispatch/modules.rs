//! Modules: their images are the client's memory, which is read here.

use super::Dispatcher;
use crate::record::Image;
use kedge_control::warn;
use kedge_cuda_types::CuError;
use kedge_device::Code;
use kedge_protocol::{CtxId, KernelNames, LoadError, ModuleId, ModuleImage};
use kedge_transport::ReplyTo;
use kedge_wire::{List, Text};
use std::sync::Arc;

/// Longest module image, bytes: the largest fatbins of the large libraries are some hundred MiB.
const MAX_IMAGE: u64 = 2 << 30;
/// Kernel names in one reply, in number and in bytes.
const MAX_NAMES: usize = 4096;
const MAX_NAME_BYTES: usize = 1 << 20;

impl Dispatcher {
    pub(super) fn load(
        &mut self,
        ctx: CtxId,
        module: ModuleId,
        image: ModuleImage,
    ) -> Result<(), LoadError> {
        let mut images = self.read_images(&[image])?;
        let image = images.pop().unwrap_or_default();
        self.load_code(ctx, module, Code::Whole(Arc::new(image)))
    }

    pub(super) fn link(
        &mut self,
        ctx: CtxId,
        module: ModuleId,
        images: &[ModuleImage],
    ) -> Result<(), LoadError> {
        let images = self.read_images(images)?.into_iter().map(Arc::new).collect();
        self.load_code(ctx, module, Code::Parts(images))
    }

    pub(super) fn load_code(
        &mut self,
        ctx: CtxId,
        module: ModuleId,
        code: Code<Image>,
    ) -> Result<(), LoadError> {
        let copies = match &code {
            Code::Whole(image) => Code::Whole(image.to_vec()),
            Code::Parts(images) => Code::Parts(images.iter().map(|image| image.to_vec()).collect()),
        };
        self.backend.load_module(ctx, module, copies)?;
        if !self.settle() {
            let unloaded = self.backend.unload_module(module);
            self.settle();
            let why = "its variables are more than the server lets you have".to_owned();
            return Err(load_error(unloaded.err().unwrap_or(CuError::OUT_OF_MEMORY), why));
        }
        self.record.module(ctx, module, code);
        Ok(())
    }

    pub(super) fn loaded(&self, to: ReplyTo, result: Result<(), LoadError>) {
        if let Err(error) = &result {
            let code = CuError(error.code);
            warn!(self.host.log, "a module did not load: {code}: {}", &*error.message);
        }
        self.answer(to, &result);
    }

    /// As many of the module's kernel names as fit into a reply, from the `first` on.
    pub(super) fn kernel_names(
        &self,
        module: ModuleId,
        first: u32,
    ) -> Result<KernelNames, CuError> {
        // What no message can hold cannot be asked for either.
        let all = self.backend.kernel_names(module)?.into_iter();
        let mut names = all.filter_map(|name| Text::new(name).ok()).skip(first as usize).peekable();
        let (mut page, mut bytes) = (Vec::new(), 0);
        while page.len() < MAX_NAMES && bytes < MAX_NAME_BYTES {
            let Some(name) = names.next() else { break };
            bytes += name.len();
            page.push(name);
        }
        let more = names.peek().is_some();
        Ok(KernelNames { names: List::new(page).unwrap_or_default(), more })
    }

    fn read_image(&self, image: &ModuleImage) -> Result<Vec<u8>, LoadError> {
        if image.len > MAX_IMAGE {
            return Err(load_error(
                CuError::INVALID_IMAGE,
                format!("an image of {} bytes exceeds the maximum {MAX_IMAGE}", image.len),
            ));
        }
        self.host.read_bytes(image.addr, image.len as usize).map_err(|error| {
            load_error(
                CuError::INVALID_IMAGE,
                format!("cannot read {} bytes at {:#x}: {error}", image.len, image.addr),
            )
        })
    }

    fn read_images(&self, images: &[ModuleImage]) -> Result<Vec<Vec<u8>>, LoadError> {
        let total = images.iter().fold(0u64, |sum, image| sum.saturating_add(image.len));
        if total > MAX_IMAGE {
            return Err(load_error(
                CuError::INVALID_IMAGE,
                format!("images of {total} bytes in all exceed the maximum {MAX_IMAGE}"),
            ));
        }
        images.iter().map(|image| self.read_image(image)).collect()
    }
}

fn load_error(code: CuError, message: String) -> LoadError {
    LoadError { code: code.0, message: Text::truncated(message) }
}
