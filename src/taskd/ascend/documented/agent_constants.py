"""Names and numbers of agents, reset files and the recover client that other programs use.

`taskd.python.toolkit.constants.constants` re-exports all of them.
"""

from taskd.ascend import mindio as _mindio
from taskd.ascend import recover_channel as _channel
from taskd.ascend import recover_client as _client
from taskd.ascend.documented import validators as _validators
from taskd.runtime import log_file as _log_file
from taskd.runtime.files import private_files as _files

STOP_TRAIN_PAUSE = _mindio.PAUSE
MINDX_START_CONTROLLER_RANK = _mindio.STARTED_BY_CLUSTER
STOP_TRAIN_ABORT = _mindio.STOP
LOCAL_PROXY_IP = _channel.LOOPBACK
SWITCH_NIC_DEFAULT_TIMEOUT = _client.PAUSE_DEFAULT_S
SWITCH_NIC_MAX_TIMEOUT = _client.PAUSE_LIMIT_S

# The reset files, which MindCluster mounts into the job's pods.
RESET_CONFIG_PATH = "/user/restore/reset/config/reset.json"
RESTART_TYPE_PATH = "/user/restore/reset/config/restartType"
RANK_TABLE_VERSION_PATH = "/user/serverid/devindex/config/version"
MAX_FILE_SIZE = _files.LIMIT_BYTES
KEY_RANK_LIST = "RankList"
KEY_RANK_ID = "RankId"
KEY_STATUS = "Status"
KEY_RETRY_TIME = "RetryTime"
KEY_GRACE_EXIT = "GracefulExit"
KEY_FAULT_FLUSH = "FaultFlushing"
KEY_RESTART_FAULT_PROCESS = "RestartFaultProcess"
KEY_RESTART_TYPE = "RestartType"
VALUE_FAULT = "fault"
VALUE_UNRECOVERED = "unrecovered"
VALUE_RECOVERED = "recovered"
VALUE_RESTART_HOTRESET_TYPE = "hotReset"
VALUE_RESTART_RESCHEDULE_TYPE = "podReschedule"

# Limits of the validators and of the Elastic Agent's log.
MIN_RANK_SIZE = 0
MAX_RANK_SIZE = _validators.MAX_RANK
MIN_DEVICE_NUM = 1
MAX_DEVICE_NUM = _validators.MAX_DEVICES
MIN_SIZE = 0
MAX_SIZE = _validators.MAX_FILE_SIZE
MAX_CKPT_NUMS = _validators.MAX_ENTRIES
LOG_PRIVILEGE = _log_file.FILE_MODE
LOG_DIR_PRIVILEGE = _log_file.DIRECTORY_MODE
LOG_BAK_PRIVILEGE = 0o400
LOG_MAX_LINE_LENGTH = 1024
LOG_SIMPLE_FORMAT = "[%(asctime)s][%(levelname)s][%(message)s]"
LOG_FILE_PATH_ENV = "ELASTIC_LOG_PATH"

# Durations in seconds, and numbers of attempts.
SLEEP_GAP = 5
GRACE_TIME_OUT = 600
WAITING_INTERVAL = 5
WAIT_TIMES = 2
INIT_TIMEOUT = 900
INIT_RESET_CHANGE_TIMEOUT = 120
WAITING_RESET_CHANGE_INTERVAL = 1
KILL_INTERVAL = 60
RELEASE_INTERVAL = 15
MONITOR_INTERVAL = 1
MAX_RESTART_INTERVAL = 60
INIT_NETWORK_TIMEOUT = 180
HIGH_AVAILABILITY_SWITCH_CHECK_TIMEOUT = 600
MAX_CONNECT_GAP = 10
MIN_REPORT_FAULT_TIMEOUT = 300
MAX_REPORT_FAULT_TIMEOUT = 600
SEND_RETRY_TIMES = 3
GRPC_REGISTER_RETRY_TIME_LIMIT = 3
MAX_INT16 = MAX_INI16 = 32767

# Environment variables.
ENABLE_RANKTABLE_ENV = "RANK_TABLE_FILE"
ENABLE_RESTART_FAULT_PROCESS_ENV = "ENABLE_RESTART_FAULT_PROCESS"
RESTART_FAULT_PROCESS_TYPE_ENV = "RESTART_FAULT_PROCESS_TYPE"
TASKD_PROCESS_ENABLE = "TASKD_PROCESS_ENABLE"
WATCHDOG_ENV = "HCCL_ASYNC_ERROR_HANDLING"
WATCHDOG_ON = "1"
WATCHDOG_OFF = "0"
HCCL_CONNECT_TIMEOUT = "HCCL_CONNECT_TIMEOUT"
LOCAL_PROXY_ENABLE = "LOCAL_PROXY_ENABLE"
TORCH_AGENT_START = "TORCH_AGENT_START"
PROCESS_RECOVER = "PROCESS_RECOVER"
POD_IP = "POD_IP"
TTP_PORT = "TTP_PORT"
WORLD_SIZE = "WORLD_SIZE"
MS_WORKER_NUM = "MS_WORKER_NUM"
HIGH_AVAILABILITY_STRATEGY = "HIGH_AVAILABILITY"
ELASTIC_TRAINING = _mindio.ELASTIC
TASKD_ENABLE = "taskd_enable"
SWITCH_ON = "on"
SWITCH_OFF = "off"

# The recover client, and the actions that clusterd orders.
GRPC_SERVER_PORT = str(_channel.PORT)
GRPC_KEEPALIVE_TIME_MS = "grpc.keepalive_time_ms"
GRPC_KEEPALIVE_TIMEOUT_MS = "grpc.keepalive_timeout_ms"
GRPC_KEEPALIVE_PERMIT_WITHOUT_CALLS = "grpc.keepalive_permit_without_calls"
GRPC_MAX_PINGS_WITHOUT_DATA = "grpc.http2.max_pings_without_data"
GRPC_SSL_TARGET_NAME_OVERRIDE = "grpc.ssl_target_name_override"
REPORT_FAULT_RANKS_CALLBACK = "report_fault_ranks"
STOP_COMPLETE_CALLBACK = "report_stop_complete"
REPORT_STRATEGIES_CALLBACK = "report_strategies"
REPORT_RESULT_CALLBACK = "report_result"
SAVE_AND_EXIT = "save_and_exit"
STOP_TRAIN = "stop_train"
PAUSE_TRAIN = "pause_train"
ON_GLOBAL_RANK = "on_global_rank"
CHANGE_STRATEGY = "change_strategy"
HOT_SWITCH = "hot switch"
STOP_SWITCH = "stop switch"
NEW_POD_RUNNING = "new pod running"
FAULT_RECOVER = "fault_recover"
RESTARTCONTROLLER = "restart_controller"
DESTRYCONTROLLER = "destroy_controller"

# Names, arguments and results of an agent's callbacks.
KILL_ALL_WORKER_CALLBACK_NAME = "KILL_WORKER"
START_ALL_WORKER_CALLBACK_NAME = "START_ALL_WORKER"
START_WORKER_LIST_CALLBACK_NAME = "START_WORKER_LIST"
MONITOR_CALLBACK_NAME = "MONITOR"
RESTART_CALLBACK_NAME = "RESTART"
KILL_ALL_WORKERS = MONITOR_ALL_WORKERS = -1
RES_OK = 0
RANK_PID_KEY = "pid"
RANK_STATUS_KEY = "status"
GLOBAL_RANK_ID_KEY = "global_rank"
RANK_STATUS_OK = None
RANK_STATUS_COMPLETE = 0
RANK_STATUS_SLEEP = 1
RANK_STATUS_NOT_START = 200
RANK_PID_NOT_EXIST = 300

# Codes of messages between agents and the manager.
RESTARTTIMESCODE = 201
REPORT_CODE = 202
EXITAGENTCODE = 203
RESTARTAGENTCODE = 208
RESTARTWORKERCODE = 209
STARTAGENTCODE = 210
AGENTPAUSESTARTTRAINCODE = 211
STOPWORKERSCODE = 213
STOPAGENTCODE = "STOP"
GRACEEXITAGENTCODE = "GRACE_EXIT"
