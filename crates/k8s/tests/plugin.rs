//! The plugin's program against a stand-in for the kubelet: its gRPC service for registrations, and
//! its calls to the plugin, as the kubelet makes them.
#![forbid(unsafe_code)]

use kedge_k8s::api::plugin::device_plugin_client::DevicePluginClient;
use kedge_k8s::api::registration::registration_server::{Registration, RegistrationServer};
use kedge_k8s::api::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, Empty, HEALTHY, PreferredAllocationRequest,
    RegisterRequest, UNHEALTHY, VERSION,
};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};

/// Far longer than anything here takes, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);
const SOCKET: &str = "kedge-kedge.dev=gpu.sock";

/// A node: the kubelet's folder, and kedge's files.
struct Node(PathBuf);

impl Node {
    fn new() -> Node {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("kedge-k8s-{}-{number}", std::process::id());
        let node = Node(std::env::temp_dir().join(name));
        fs::create_dir_all(node.kubelet()).unwrap();
        fs::write(node.library(), "a library").unwrap();
        node
    }

    fn kubelet(&self) -> PathBuf {
        self.0.join("plugins")
    }

    fn library(&self) -> PathBuf {
        self.0.join("libcuda.so.1")
    }

    fn socket(&self) -> PathBuf {
        self.kubelet().join(SOCKET)
    }

    fn plugin(&self, more: &[&str]) -> Plugin {
        let mount = format!("{}=/usr/lib/libcuda.so.1", self.library().display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_kedge-k8s"));
        command.arg("--folder").arg(self.kubelet());
        command.args(["--resource", "kedge.dev/gpu", "--devices", "2", "--mount", &mount]);
        command.args(["--env", "KEDGE_LIB_DIR=/usr/local/lib/kedge"]).args(more);
        Plugin(command.spawn().unwrap())
    }

    async fn client(&self) -> DevicePluginClient<Channel> {
        let address = format!("unix:{}", self.socket().display());
        let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        // The answers to hostile requests are the plugin's: what is too large is refused there.
        DevicePluginClient::new(channel).max_encoding_message_size(1 << 30)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The plugin's process.
struct Plugin(Child);

impl Plugin {
    fn signal(&self, signal: &str) {
        let told = Command::new("kill").args([signal, &self.0.id().to_string()]).status();
        assert!(told.unwrap().success());
    }

    async fn ends(&mut self) -> ExitStatus {
        let mut waited = Duration::ZERO;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(waited < TIMEOUT, "the plugin does not end");
            waited += Duration::from_millis(20);
            sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The stand-in: it notes who registers, and refuses the first of them where it is told to.
struct Kubelet {
    server: JoinHandle<()>,
    registered: mpsc::UnboundedReceiver<RegisterRequest>,
}

struct Registers {
    seen: mpsc::UnboundedSender<RegisterRequest>,
    refuses: AtomicU32,
}

#[tonic::async_trait]
impl Registration for Registers {
    async fn register(&self, told: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let _ = self.seen.send(told.into_inner());
        match self.refuses.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)) {
            Ok(_) => Err(Status::unavailable("not yet")),
            Err(_) => Ok(Response::new(Empty {})),
        }
    }
}

impl Kubelet {
    /// Empties its folder, as the kubelet does when it starts, and listens there.
    fn starts(node: &Node, refuses: u32) -> Kubelet {
        for entry in fs::read_dir(node.kubelet()).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let listener = UnixListener::bind(node.kubelet().join("kubelet.sock")).unwrap();
        let (seen, registered) = mpsc::unbounded_channel();
        let service = Registers { seen, refuses: AtomicU32::new(refuses) };
        let service = RegistrationServer::new(service);
        let server =
            Server::builder().serve_with_incoming(service, UnixListenerStream::new(listener));
        let server = tokio::spawn(async move { server.await.unwrap() });
        Kubelet { server, registered }
    }

    async fn is_told(&mut self) -> RegisterRequest {
        timeout(TIMEOUT, self.registered.recv()).await.expect("a registration").unwrap()
    }

    fn ends(self) {
        self.server.abort();
    }
}

async fn allocate(
    client: &mut DevicePluginClient<Channel>,
    ids: Vec<String>,
) -> Result<ContainerAllocateResponse, Status> {
    let container_requests = vec![ContainerAllocateRequest { devices_ids: ids }];
    let answer = client.allocate(AllocateRequest { container_requests }).await?;
    Ok(answer.into_inner().container_responses.remove(0))
}

fn ids(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

async fn gone(path: &Path) {
    let mut waited = Duration::ZERO;
    while path.exists() {
        assert!(waited < TIMEOUT, "{} stays", path.display());
        waited += Duration::from_millis(20);
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_container_gets_its_devices() {
    let node = Node::new();
    let mut kubelet = Kubelet::starts(&node, 0);
    let mut plugin = node.plugin(&[]);
    let told = kubelet.is_told().await;
    assert_eq!((&*told.version, &*told.resource_name), (VERSION, "kedge.dev/gpu"));
    assert_eq!(told.endpoint, SOCKET);
    let mode = fs::metadata(node.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "the kubelet's user alone may ask");
    let mut client = node.client().await;
    let about = client.get_device_plugin_options(Empty {}).await.unwrap().into_inner();
    assert_eq!(Some(about), told.options);
    let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
    let list = timeout(TIMEOUT, lists.message()).await.unwrap().unwrap().unwrap().devices;
    let list: Vec<_> = list.iter().map(|device| (&*device.id, &*device.health)).collect();
    assert_eq!(list, [("soft0", HEALTHY), ("soft1", HEALTHY)]);
    let edits = allocate(&mut client, ids("soft1")).await.unwrap();
    assert_eq!(edits.envs["KEDGE_DEVICE_SOFT1"], "soft");
    assert_eq!(edits.envs["KEDGE_LIB_DIR"], "/usr/local/lib/kedge");
    assert_eq!(edits.envs.len(), 2);
    let mount = &edits.mounts[0];
    assert_eq!(mount.host_path, node.library().to_str().unwrap());
    assert!(mount.read_only && mount.container_path == "/usr/lib/libcuda.so.1");
    // Asked to end while the kubelet listens to it: the list ends, and so does the plugin.
    plugin.signal("-TERM");
    assert_eq!(plugin.ends().await.code(), Some(0));
    assert!(!node.socket().exists(), "the socket is left");
    let end = timeout(TIMEOUT, lists.message()).await.unwrap();
    assert!(matches!(end, Ok(None)), "{end:?}");
    kubelet.ends();
}

#[tokio::test]
async fn by_cdi_a_container_gets_names() {
    let node = Node::new();
    let mut kubelet = Kubelet::starts(&node, 0);
    let _plugin = node.plugin(&["--cdi", "kedge.dev/gpu", "--share", "3"]);
    kubelet.is_told().await;
    let mut client = node.client().await;
    let edits = allocate(&mut client, ids("soft1-2 soft0-0")).await.unwrap();
    let names: Vec<_> = edits.cdi_devices.iter().map(|device| &*device.name).collect();
    assert_eq!(names, ["kedge.dev/gpu=soft0", "kedge.dev/gpu=soft1"]);
    assert!(edits.mounts.is_empty() && edits.envs.is_empty());
    let asked = ContainerPreferredAllocationRequest {
        available_device_ids: ids("soft0-2 soft1-0 soft1-2"),
        must_include_device_ids: Vec::new(),
        allocation_size: 2,
    };
    let request = PreferredAllocationRequest { container_requests: vec![asked] };
    let answer = client.get_preferred_allocation(request).await.unwrap().into_inner();
    assert_eq!(answer.container_responses[0].device_ids, ids("soft1-0 soft0-2"));
    kubelet.ends();
}

#[tokio::test]
async fn a_kubelet_that_restarts_is_told_again() {
    let node = Node::new();
    // The plugin is there first.
    let mut plugin = node.plugin(&[]);
    for round in 0..3 {
        let mut kubelet = Kubelet::starts(&node, 0);
        assert_eq!(kubelet.is_told().await.endpoint, SOCKET, "round {round}");
        let mut client = node.client().await;
        assert!(allocate(&mut client, ids("soft0")).await.is_ok(), "round {round}");
        kubelet.ends();
    }
    // A kubelet that only ends leaves nobody to serve.
    fs::remove_file(node.kubelet().join("kubelet.sock")).unwrap();
    gone(&node.socket()).await;
    plugin.signal("-TERM");
    assert_eq!(plugin.ends().await.code(), Some(0));
}

#[tokio::test]
async fn a_refused_registration_is_tried_again() {
    let node = Node::new();
    let mut kubelet = Kubelet::starts(&node, 2);
    let _plugin = node.plugin(&[]);
    for _ in 0..3 {
        kubelet.is_told().await;
    }
    let mut client = node.client().await;
    assert!(allocate(&mut client, ids("soft0")).await.is_ok());
    kubelet.ends();
}

#[tokio::test]
async fn a_killed_plugin_s_socket_is_taken_over() {
    let node = Node::new();
    let mut kubelet = Kubelet::starts(&node, 0);
    let mut killed = node.plugin(&[]);
    kubelet.is_told().await;
    killed.signal("-KILL");
    assert_eq!(killed.ends().await.signal(), Some(9));
    assert!(node.socket().exists());
    let _plugin = node.plugin(&[]);
    kubelet.is_told().await;
    assert!(allocate(&mut node.client().await, ids("soft0 soft1")).await.is_ok());
    kubelet.ends();
}

#[tokio::test]
async fn what_is_no_socket_stays() {
    let node = Node::new();
    let kubelet = Kubelet::starts(&node, 0);
    fs::write(node.socket(), "somebody's").unwrap();
    let mut plugin = node.plugin(&[]);
    assert_eq!(plugin.ends().await.code(), Some(125));
    assert_eq!(fs::read_to_string(node.socket()).unwrap(), "somebody's");
    kubelet.ends();
}

#[tokio::test]
async fn devices_are_as_healthy_as_kedge_s_files() {
    let node = Node::new();
    let mut kubelet = Kubelet::starts(&node, 0);
    let _plugin = node.plugin(&[]);
    kubelet.is_told().await;
    let mut client = node.client().await;
    let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
    let mut health = async || {
        let list = timeout(TIMEOUT, lists.message()).await.unwrap().unwrap().unwrap().devices;
        assert_eq!(list.len(), 2);
        list[0].health.clone()
    };
    assert_eq!(health().await, HEALTHY);
    fs::remove_file(node.library()).unwrap();
    assert_eq!(health().await, UNHEALTHY);
    let refused = allocate(&mut client, ids("soft0")).await.unwrap_err();
    assert!(refused.message().contains("libcuda.so.1"), "{refused}");
    fs::write(node.library(), "a library").unwrap();
    assert_eq!(health().await, HEALTHY);
    kubelet.ends();
}

#[tokio::test]
async fn hostile_requests_are_refused_and_others_served() {
    let node = Node::new();
    let mut kubelet = Kubelet::starts(&node, 0);
    let _plugin = node.plugin(&[]);
    kubelet.is_told().await;
    let mut client = node.client().await;
    for asked in [
        ids("soft7"),
        ids("../../etc"),
        ids("soft0 soft0"),
        ids("soft0 soft1 soft2"),
        vec![String::new()],
        vec!["x".repeat(1 << 20)],
        vec!["soft0".to_owned(); 100_000],
    ] {
        let refused = allocate(&mut client, asked).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().len() < 200, "{}", refused.message());
    }
    let many = vec![ContainerAllocateRequest { devices_ids: Vec::new() }; 100_000];
    let refused = client.allocate(AllocateRequest { container_requests: many }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    // Beyond what is read at all.
    let huge = allocate(&mut client, vec!["x".repeat(32 << 20)]).await.unwrap_err();
    assert_eq!(huge.code(), Code::OutOfRange, "{huge}");
    let size = ContainerPreferredAllocationRequest {
        available_device_ids: ids("soft0 soft9"),
        must_include_device_ids: ids("soft8"),
        allocation_size: i32::MIN,
    };
    let request = PreferredAllocationRequest { container_requests: vec![size] };
    let answer = client.get_preferred_allocation(request).await.unwrap().into_inner();
    assert!(answer.container_responses[0].device_ids.is_empty());
    // What is no HTTP/2, and who says nothing.
    let mut stranger = std::os::unix::net::UnixStream::connect(node.socket()).unwrap();
    let _ = stranger.write_all(&[0xff; 1 << 16]);
    let _silent = std::os::unix::net::UnixStream::connect(node.socket()).unwrap();
    assert!(allocate(&mut node.client().await, ids("soft0")).await.is_ok());
    kubelet.ends();
}
