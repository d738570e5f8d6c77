//! The plugin's service: what the kubelet asks.

use crate::api::plugin::device_plugin_server::DevicePlugin;
use crate::api::{
    AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse, Device,
    DevicePluginOptions, Empty, ListAndWatchResponse, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
};
use crate::offer::Offer;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

/// What the plugin tells of itself, at its registration and when it is asked.
pub(crate) const ABOUT: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };
/// Containers of one request; the kubelet asks for one at a time.
const MAX_CONTAINERS: usize = 256;

/// Answers the kubelet.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) offer: Arc<Offer>,
    /// The devices, each time that their health changes. The lists end with the plugin.
    pub(crate) devices: watch::Receiver<Vec<Device>>,
}

fn few_containers(count: usize) -> Result<(), Status> {
    if count <= MAX_CONTAINERS {
        return Ok(());
    }
    Err(Status::invalid_argument(format!("{count} containers at a time: {MAX_CONTAINERS} at most")))
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(ABOUT))
    }

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = WatchStream::new(self.devices.clone());
        Ok(Response::new(Box::pin(lists.map(|devices| Ok(ListAndWatchResponse { devices })))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let requests = request.into_inner().container_requests;
        few_containers(requests.len())?;
        let prefer = |asked: crate::api::ContainerPreferredAllocationRequest| {
            let size = usize::try_from(asked.allocation_size).unwrap_or(0);
            let (available, must) = (&asked.available_device_ids, &asked.must_include_device_ids);
            let device_ids = self.offer.prefer(available, must, size);
            ContainerPreferredAllocationResponse { device_ids }
        };
        let container_responses = requests.into_iter().map(prefer).collect();
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let requests = request.into_inner().container_requests;
        few_containers(requests.len())?;
        let answers = requests.iter().map(|asked| self.offer.allocate(&asked.devices_ids));
        match answers.collect() {
            Ok(container_responses) => Ok(Response::new(AllocateResponse { container_responses })),
            Err(error) => {
                eprintln!("kedge-k8s: refused: {error}");
                Err(Status::invalid_argument(error.to_string()))
            }
        }
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
